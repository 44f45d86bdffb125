package measure

import (
	"testing"
	"time"
)

func TestPercentiles(t *testing.T) {
	if TimesOf(nil) != nil {
		t.Error("no times have percentiles")
	}
	var list []time.Duration
	for i := 2000; i > 0; i-- {
		list = append(list, time.Duration(i)*time.Microsecond)
	}
	if got, want := *TimesOf(list), (Times{2000, 1001, 1801, 1981, 1999, 2000}); got != want {
		t.Errorf("1 to 2000 µs have %+v, want %+v", got, want)
	}
	if got := TimesOf([]time.Duration{5 * time.Microsecond}); got.P50 != 5 || got.Max != 5 {
		t.Errorf("one time has %+v", got)
	}
}

func TestRingTimes(t *testing.T) {
	r, err := (&Copies{}).Do(Job{Kind: Ring, Duration: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if r.Times == nil || r.Times.Count < 1 || r.Times.P50 <= 0 {
		t.Errorf("operations through a ring took %+v", r.Times)
	}
}
