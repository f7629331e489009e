// The token that is pointed at, which all pictures of a panel emphasise.

export function createHover() {
  const listeners = new Map();
  return {
    // The tokens of a pair, such as the query and the key of a weight; null for none.
    set(first, second = null) {
      listeners.forEach((listener) => listener(first, second));
    },
    listen(name, listener) {
      listeners.set(name, listener);
    },
    drop(name) {
      listeners.delete(name);
    },
  };
}
