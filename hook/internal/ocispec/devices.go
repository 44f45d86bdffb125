package ocispec

import "slices"

// Requested are the devices that one hook of a container requests: the GPUs of a device
// peerlane.dev/gpu=, or of a device peerlane.dev/lane=.
type Requested struct{ GPUs, Lanes []string }

// RequestedDevices returns the devices that hooks of this program request, in order. Package cdi
// writes an option and its value as two arguments, which hooks of other programs do not have.
func (s *Spec) RequestedDevices() []Requested {
	var all []Requested
	for _, hook := range slices.Concat(s.Hooks.Prestart, s.Hooks.CreateRuntime) {
		if len(hook.Args) < 2 || hook.Args[1] != "create" {
			continue
		}
		var a Requested
		for i := 2; i+1 < len(hook.Args); i++ {
			switch hook.Args[i] {
			case "--gpu":
				a.GPUs = append(a.GPUs, hook.Args[i+1])
			case "--lane":
				a.Lanes = append(a.Lanes, hook.Args[i+1])
			}
		}
		if len(a.GPUs)+len(a.Lanes) > 0 {
			all = append(all, a)
		}
	}
	return all
}
