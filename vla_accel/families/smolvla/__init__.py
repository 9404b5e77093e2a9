"""SmolVLA."""
