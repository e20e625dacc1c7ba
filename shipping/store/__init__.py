"""Where bundles are kept for devices: folders, HTTP servers, object storage, the Hugging Face hub, OCI registries."""
