"""The mills: complete applications, each a short story on top of the runtime."""
