// Package lanes describes the lanes of a node as devices of Kubernetes' dynamic resource allocation
// (DRA).
package lanes
