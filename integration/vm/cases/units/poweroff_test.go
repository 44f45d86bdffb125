//go:build vm

package units_test

import (
	"os"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/vm/inside"
)

// TestPowerOff ends the machine with relays in it, whose containers nobody ends.
// A test on the host waits for that: integration/vm.TestAHostWithRelaysShutsDown.
func TestPowerOff(t *testing.T) {
	if os.Getenv("PEERLANE_VM_POWEROFF") == "" {
		t.Skip("it ends the machine; vm-host shutdown-with-relays runs it in one of its own")
	}
	o := newOperator(t, asItIs)
	for range 2 {
		_, g := o.start()
		o.unitOf(g)
	}
	inside.Command(t, "systemctl", "--no-block", "poweroff")
	time.Sleep(time.Hour)
}
