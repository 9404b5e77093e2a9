"""What the bundled demo policy was trained with: start states and a scripted expert."""
