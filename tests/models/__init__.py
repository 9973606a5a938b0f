"""What works with each family of models: proven with small random models, recorded, and shown in docs/models.md."""
