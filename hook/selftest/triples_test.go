package selftest

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Every result renews the limit for the next triple, and a triple without a result ends the test.
func TestLimitEachTripleEndsAtItsOwnLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := errors.New("it is late")
		began := time.Now()
		ctx, renew, stop := limitEach(t.Context(), 15*time.Second, 10*time.Second, late)
		defer stop()
		for range 5 {
			time.Sleep(9 * time.Second)
			if ctx.Err() != nil {
				t.Fatalf("the test ended after %v", time.Since(began))
			}
			renew()
		}
		<-ctx.Done()
		if took := time.Since(began); took != 55*time.Second || context.Cause(ctx) != late {
			t.Errorf("the test ended after %v: %v", took, context.Cause(ctx))
		}
	})
}
