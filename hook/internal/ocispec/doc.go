// Package ocispec reads the parts of a container's config.json that the hook uses. The content is
// hostile input: its size is limited, and duplicate keys are refused.
package ocispec
