package hostinstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/relay/network"
)

// FollowKey copies the cluster key from a mounted Secret to the host, at the start and after each
// change of the Secret, until the context ends. The host's key stays while the Secret has no key or
// a faulty key.
func FollowKey(ctx context.Context, secret, host string, poll time.Duration, log *logrus.Logger) {
	failures := health.Failures{Log: log, Message: "Copying the cluster key failed; the key of the host stays"}
	for {
		id, err := CopyKey(secret, host)
		failures.Note(err)
		if id != "" {
			log.WithField("keys", id).Info("Replaced the cluster key of the host")
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(poll):
		}
	}
}

// CopyKey replaces the host's cluster key by the key of a Secret, and returns the ids of the new
// keys; empty if the host already has the key. No error contains a key.
func CopyKey(secret, host string) (ids string, err error) {
	text, err := os.ReadFile(secret)
	if err != nil {
		return "", err
	}
	keys, err := network.ParseKeys(text)
	if err != nil {
		return "", fmt.Errorf("cluster key %s: %w", secret, err)
	}
	if err := os.MkdirAll(filepath.Dir(host), 0o755); err != nil {
		return "", err
	}
	// Refuse a link, which would direct the copy to another file.
	if info, err := os.Lstat(host); err == nil && !info.Mode().IsRegular() {
		return "", fmt.Errorf("cluster key %s is not a regular file: %v", host, info.Mode())
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	changed, err := WriteFile(host, text, 0o600)
	if !changed || err != nil {
		return "", err
	}
	return keys.String(), nil
}
