package sum

import "testing"

func TestOfListReturnsSum(t *testing.T) {
	if got := Of([]int{1, 2}, 9); got != 3 {
		t.Errorf("%d, want 3", got)
	}
	if got := Of([]int{8, 2}, 9); got != 9 {
		t.Errorf("%d, want 9", got)
	}
}
