// Package documents checks the documentation: the targets of links, the codes of messages, and the
// names of tests. Each message of a program has a code or is listed as internal. The package also
// draws the diagrams.
package documents
