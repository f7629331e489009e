"""The lens: a page that shows what a trained model attends to, and lets the reader change it."""
