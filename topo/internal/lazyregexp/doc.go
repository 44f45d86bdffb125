// Package lazyregexp compiles regular expressions at the first use: the hook delays each container start, and needs few of them.
package lazyregexp
