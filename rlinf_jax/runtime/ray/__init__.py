"""Places in processes of their own, which Ray starts and connects."""
