"""An app with Adam, two classes a node and seeded clients."""
