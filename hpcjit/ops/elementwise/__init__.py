"""Element-wise operators that belong to no other group."""
