// Package ocispec reads the parts of a container's config.json that the hook needs. The content
// is hostile input: it is bounded, and duplicate keys are refused.
package ocispec
