// Package lazyregexp compiles regular expressions at the first use: the hook delays container
// starts, and needs few expressions.
package lazyregexp
