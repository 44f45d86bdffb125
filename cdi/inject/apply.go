package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// apply returns the text of a config.json with CDI devices of the specifications in specDirs; the
// last directory has precedence. apply is idempotent: it does not repeat edits that the text
// already has.
func apply(config []byte, specDirs, devices []string) ([]byte, error) {
	var before, after specs.Spec
	for _, spec := range []*specs.Spec{&before, &after} { // decode twice, because the library changes lists in place
		if err := json.Unmarshal(config, spec); err != nil {
			return nil, fmt.Errorf("read config.json: %w", err)
		}
	}
	if err := inject(&after, specDirs, devices); err != nil {
		return nil, err
	}
	removeDuplicates(&before, &after)
	text, err := merge(config, &before, &after)
	if err != nil {
		return nil, fmt.Errorf("change config.json: %w", err)
	}
	return text, nil
}

// inject applies devices to a specification with the CDI library.
func inject(spec *specs.Spec, specDirs, devices []string) error {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(specDirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read the CDI specifications in %s: %w", strings.Join(specDirs, ", "), err)
	}
	unknown, err := cache.InjectDevices(spec, devices...)
	switch {
	case len(unknown) > 0:
		return unresolvedError(cache, specDirs, unknown)
	case err != nil:
		return fmt.Errorf("apply the CDI devices %s: %w", strings.Join(devices, ", "), err)
	}
	return nil
}

// unresolvedError returns the error of unknown devices: no specification defines the device, two
// specifications define it, or a specification is unreadable.
func unresolvedError(cache *cdi.Cache, specDirs, devices []string) error {
	seen := map[string]bool{}
	var why []string
	for path, problems := range cache.GetErrors() {
		for _, problem := range problems {
			// The library reports a conflict for both files, in the same words.
			if text := problem.Error(); !seen[text] {
				seen[text] = true
				if !strings.Contains(text, path) {
					text = path + ": " + text
				}
				why = append(why, text)
			}
		}
	}
	slices.Sort(why)
	return &unknownDeviceError{specDirs, devices, why}
}

// unknownDeviceError is the error of devices without a usable specification.
type unknownDeviceError struct {
	specDirs, devices []string
	// problems are the errors of the files in specDirs, sorted.
	problems []string
}

func (e *unknownDeviceError) Error() string {
	text := fmt.Sprintf(
		"no CDI specification in %s defines the device %s",
		strings.Join(e.specDirs, " or "),
		strings.Join(e.devices, ", "),
	)
	if len(e.problems) > 0 {
		return fmt.Sprintf("%s; errors there: %s", text, strings.Join(e.problems, "; "))
	}
	if strings.HasPrefix(e.devices[0], "peerlane.dev/") {
		return fmt.Sprintf("%s; `peerlane cdi generate --spec-dir %s` makes one", text, e.specDirs[0])
	}
	return text + "; the vendor's toolkit makes one"
}

// removeDuplicates removes the hooks and rules that the library added a second time. The library
// replaces variables, nodes and mounts of one name, but appends hooks and rules.
func removeDuplicates(before, after *specs.Spec) {
	if before.Hooks != nil {
		for i, list := range hooks(after.Hooks) {
			earlier := *hooks(before.Hooks)[i].hooks
			*list.hooks = withoutRepeats(earlier, len(earlier), *list.hooks)
		}
	}
	if before.Linux != nil && before.Linux.Resources != nil {
		earlier := before.Linux.Resources.Devices
		// A later rule overrides an earlier one, so a rule before a denial must be repeated.
		valid := earlier
		for i, rule := range earlier {
			if !rule.Allow {
				valid = earlier[i+1:]
			}
		}
		after.Linux.Resources.Devices = withoutRepeats(valid, len(earlier), after.Linux.Resources.Devices)
	}
}

// withoutRepeats removes the elements of earlier from a list, except among its first elements.
func withoutRepeats[T any](earlier []T, first int, list []T) []T {
	return append(list[:first:first], slices.DeleteFunc(list[first:], func(added T) bool {
		return slices.ContainsFunc(earlier, func(h T) bool { return reflect.DeepEqual(h, added) })
	})...)
}

// hookList is the list of hooks of one stage of a container.
type hookList struct {
	// name is the key in config.json.
	name  string
	hooks *[]specs.Hook
}

func hooks(h *specs.Hooks) []hookList {
	return []hookList{
		//lint:ignore SA1019 CDI specifications may name it
		{"prestart", &h.Prestart},
		{"createRuntime", &h.CreateRuntime},
		{"createContainer", &h.CreateContainer},
		{"startContainer", &h.StartContainer},
		{"poststart", &h.Poststart},
		{"poststop", &h.Poststop},
	}
}

// object is a JSON object with undecoded values.
type object map[string]json.RawMessage

// merge applies the differences between before and after to config. before is the decoded config.
func merge(config []byte, before, after *specs.Spec) ([]byte, error) {
	var top object
	if err := json.Unmarshal(config, &top); err != nil {
		return nil, err
	}
	m := merger{}
	mergeList(&m, top, "mounts", before.Mounts, after.Mounts)

	oldProcess, newProcess := orZero(before.Process), orZero(after.Process)
	m.below(top, "process", func(process object) {
		mergeList(&m, process, "env", oldProcess.Env, newProcess.Env)
		m.below(process, "user", func(user object) {
			mergeList(&m, user, "additionalGids", oldProcess.User.AdditionalGids, newProcess.User.AdditionalGids)
		})
	})

	oldHooks, newHooks := orZero(before.Hooks), orZero(after.Hooks)
	m.below(top, "hooks", func(all object) {
		for i, list := range hooks(&newHooks) {
			mergeList(&m, all, list.name, *hooks(&oldHooks)[i].hooks, *list.hooks)
		}
	})

	oldLinux, newLinux := orZero(before.Linux), orZero(after.Linux)
	m.below(top, "linux", func(linux object) {
		mergeList(&m, linux, "devices", oldLinux.Devices, newLinux.Devices)
		m.below(linux, "resources", func(resources object) {
			mergeList(&m, resources, "devices", orZero(oldLinux.Resources).Devices, orZero(newLinux.Resources).Devices)
		})
		m.below(linux, "netDevices", func(net object) {
			for name, device := range newLinux.NetDevices {
				if !reflect.DeepEqual(oldLinux.NetDevices[name], device) || net[name] == nil {
					m.set(net, name, device)
				}
			}
		})
		if !reflect.DeepEqual(oldLinux.IntelRdt, newLinux.IntelRdt) {
			m.set(linux, "intelRdt", newLinux.IntelRdt)
		}
	})
	if m.err != nil {
		return nil, m.err
	}
	text, err := json.MarshalIndent(top, "", "\t")
	if err != nil {
		return nil, err
	}
	return text, check(text, after)
}

// check verifies that a text decodes to want, so that merge misses no change by this or a later
// version of the library.
func check(text []byte, want *specs.Spec) error {
	var got specs.Spec
	if err := json.Unmarshal(text, &got); err != nil {
		return err
	}
	gotText, err := json.Marshal(got)
	if err != nil {
		return err
	}
	wantText, err := json.Marshal(want)
	if err != nil {
		return err
	}
	if !bytes.Equal(gotText, wantText) {
		return errUnwritable
	}
	return nil
}

// Errors of a config.json that this program cannot change.
var (
	errUnwritable = errors.New("the CDI library changes a part of config.json that this program cannot write, or the " +
		"file has a key twice; please report it")
	errKeyTwice = errors.New("the file has a key twice")
)

// merger edits JSON objects and keeps the first error.
type merger struct{ err error }

func (m *merger) fail(err error) {
	if m.err == nil {
		m.err = err
	}
}

// below changes the object at a key. It creates the object only if change adds a key.
func (m *merger) below(o object, key string, change func(object)) {
	var inner object
	if raw, ok := o[key]; ok {
		if err := json.Unmarshal(raw, &inner); err != nil {
			m.fail(fmt.Errorf("%s: %w", key, err))
			return
		}
	}
	if inner == nil { // also after "null"
		inner = object{}
	}
	change(inner) // which removes no key
	if len(inner) > 0 {
		m.set(o, key, inner)
	}
}

func (m *merger) set(o object, key string, value any) {
	raw, err := json.Marshal(value)
	if err != nil {
		m.fail(fmt.Errorf("%s: %w", key, err))
		return
	}
	o[key] = raw
}

// mergeList replaces a changed list. Present elements keep their text.
func mergeList[T any](m *merger, o object, key string, before, after []T) {
	if reflect.DeepEqual(before, after) || len(before) == 0 && len(after) == 0 {
		return
	}
	var texts []json.RawMessage
	if raw, ok := o[key]; ok {
		if err := json.Unmarshal(raw, &texts); err != nil {
			m.fail(fmt.Errorf("%s: %w", key, err))
			return
		}
	}
	if len(texts) != len(before) {
		m.fail(
			fmt.Errorf(
				"%s has %d elements in the text and %d after decoding; %w",
				key,
				len(texts),
				len(before),
				errKeyTwice,
			),
		)
		return
	}
	used := make([]bool, len(before))
	var merged []any
	for _, element := range after {
		var text any = element
		for i := range before {
			if !used[i] && reflect.DeepEqual(before[i], element) {
				used[i], text = true, texts[i]
				break
			}
		}
		merged = append(merged, text)
	}
	m.set(o, key, merged)
}

// orZero returns the target of p, or the zero value for nil.
func orZero[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
