C_API: object
