// Package documents has what checks the pages that people read: that their links lead
// somewhere, and that each message that a program can print is explained.
package documents
