"""Expert load balancing by linear programming."""
