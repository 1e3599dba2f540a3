"""Says which layouts: rules from the user and what follows from them."""
