"""How much error every rule and method leaves."""
