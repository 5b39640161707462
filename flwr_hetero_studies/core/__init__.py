"""What all studies share: runner, record, driver, figures, tables, pages."""
