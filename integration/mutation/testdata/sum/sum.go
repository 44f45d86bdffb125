// Package sum is code with mutants of every outcome.
package sum

// Of returns the sum of a list, at most limit.
func Of(list []int, limit int) int {
	sum := 0
	for _, n := range list {
		sum += n
	}
	if sum > limit {
		sum = limit
	}
	return sum
}

// Empty reports whether a list is empty.
func Empty(list []int) bool { return len(list) == 0 }
