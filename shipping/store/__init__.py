"""Places that keep bundles for devices: folders, HTTP servers, object storage, the Hugging Face hub, OCI registries."""
