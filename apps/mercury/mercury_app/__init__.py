"""Mercury: importance sampling on the node, sized to the link."""
