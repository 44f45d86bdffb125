// Package documents checks the documentation: the targets of links, that each message of a program
// has a code or is listed as internal, and that each named test exists. It also draws the diagrams.
package documents
