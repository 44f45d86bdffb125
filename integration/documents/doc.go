// Package documents checks the documentation: the targets of links, and that each message of a
// program has a code or is listed as internal. It also draws the diagrams.
package documents
