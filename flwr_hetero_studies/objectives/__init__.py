"""What selection and weights do to data that slow nodes alone hold."""
