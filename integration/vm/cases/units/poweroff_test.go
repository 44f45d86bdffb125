//go:build vm

package units_test

import (
	"os"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/vm/inside"
)

// TestPowerOffWithRelaysCompletes powers the machine off while relays and containers run.
// integration/vm.TestHostWithRelaysShutsDown waits for the power-off on the host.
func TestPowerOffWithRelaysCompletes(t *testing.T) {
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
