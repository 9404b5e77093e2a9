"""Operations on rows: norms, embeddings, rotations."""
