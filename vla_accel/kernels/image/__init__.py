"""Operations of image networks and image preprocessing."""
