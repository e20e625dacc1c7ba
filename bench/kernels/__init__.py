"""Speed of products and of whole layers in the extension."""
