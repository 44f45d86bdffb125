package doctor

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/relay/launch"
)

// suffer applies faults to a host, examines the host and reverts the faults.
func (m *made) suffer(list ...fault) []Finding {
	m.t.Helper()
	defer m.undo()
	for _, f := range list {
		f.change(m)
	}
	// Install the plan and test the pairs of the host with its faults.
	if slices.ContainsFunc(list, func(f fault) bool { return f.replan }) {
		m.keepInstalled()
		asIs := m.host()
		m.installFrom(asIs)
		m.passedOn(asIs, func(*launch.Pair) {})
	}
	for _, f := range list {
		f.after(m)
	}
	return Examine(context.Background(), m.host(), All())
}

// wrong returns the findings other than OK, in the form of fault.finds.
func wrong(found []Finding) (list []string) {
	for _, f := range found {
		if f.Status > OK {
			list = append(list, f.Status.String()+" "+f.Check)
		}
	}
	return list
}

func sayings(found []Finding) string {
	var b strings.Builder
	for _, f := range found {
		if f.Status > OK {
			fmt.Fprintf(&b, "%v %s on %s, lanes %v: %s; %s; %s\n", f.Status, f.Check, f.On, f.Lanes, f.Found, f.Why, f.Remedy)
		}
	}
	return b.String()
}

// Each fault is found by its own checks and by no others; on a host without faults every check is
// OK.
func TestEachFaultIsFoundByItsChecksAlone(t *testing.T) {
	m := newMade(t)
	finds := map[string]bool{}
	check := func(name string, want []string, wants string, list ...fault) {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			m.t = t
			found := m.suffer(list...)
			if diff := cmp.Diff(distinct(want), distinct(wrong(found))); diff != "" {
				t.Fatalf("findings (-want +got):\n%s%s", diff, sayings(found))
			}
			if !strings.Contains(sayings(found), wants) {
				t.Errorf("no %q in\n%s", wants, sayings(found))
			}
			for _, f := range found {
				if f.Check == "" || f.Subject == "" || f.LookedAt == "" || f.Found == "" || f.On == "" ||
					(f.Status <= OK) != (f.Why == "") || (f.Status <= OK) != (f.Remedy == "") {
					t.Errorf("a finding that is not whole: %+v", f)
				}
				// Users paste remedies, and restarting an engine can end every container.
				if i := strings.Index(f.Remedy, "restart docker"); i >= 0 &&
					!strings.Contains(f.Remedy[i:], "ends all of its containers") ||
					strings.Contains(f.Remedy, "&& systemctl restart") || strings.Contains(f.Remedy, "restart the engine") {
					t.Errorf("missing word on the containers that a restart ends: %s", f.Remedy)
				}
				if f.Status > OK {
					finds[f.Check] = true
				}
			}
		})
	}
	check("a host that is right", nil, "")
	for _, f := range faults() {
		check(f.name, f.finds, f.want, f)
	}
	m.t = t
	check("a host that is right again", nil, "")
	for _, c := range All() {
		if !finds[c.Name] && c.Name != "configuration" { // its own test covers it
			t.Errorf("no made host has a fault that %s finds", c.Name)
		}
	}
}

// Every fault of a combination is found as if it were alone.
func TestCombinedFaultsAreEachFound(t *testing.T) {
	m := newMade(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	all := faults()
	for range rounds() {
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		var some []fault
		var names, want []string
		for _, f := range all {
			if len(some) < 6 && !slices.ContainsFunc(some, f.hides) {
				some, names, want = append(some, f), append(names, f.name), append(want, f.finds...)
			}
		}
		found := m.suffer(some...)
		got, want := distinct(wrong(found)), distinct(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s%s", strings.Join(names, ", "), diff, sayings(found))
		}
	}
}

// distinct removes duplicates, because one check can find several faults.
func distinct(list []string) []string {
	list = slices.Sorted(slices.Values(list))
	return slices.Compact(list)
}

// hides reports whether two faults concern the same object.
func (f fault) hides(o fault) bool {
	return slices.ContainsFunc(strings.Fields(f.of), func(
		word string) bool {
		return slices.Contains(strings.Fields(o.of), word)
	})
}

// rounds returns the number of combinations to try: PEERLANE_DOCTOR_ROUNDS, or a default.
func rounds() int {
	if n, err := strconv.Atoi(os.Getenv("PEERLANE_DOCTOR_ROUNDS")); err == nil {
		return n
	}
	return 8
}
