"""HTTP requests and answers: fields, the forms of each API, errors, metrics."""
