"""Models and updates in few bits: blocks with one scale each, and feedback of the error."""
