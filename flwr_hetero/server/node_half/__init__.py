"""What the server makes of the node's half: its work record, and hints where it is missing."""
