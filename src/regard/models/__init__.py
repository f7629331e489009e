"""Model families: for each family, a spec and the module that the spec builds."""
