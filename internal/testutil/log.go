package testutil

import (
	"io"
	"os"
	"testing"

	"github.com/sirupsen/logrus"
)

// HookLog passes log entries of a level and above to a hook in place of the output, until the test ends.
func HookLog(t *testing.T, level logrus.Level, hook logrus.Hook) {
	t.Helper()
	before := logrus.GetLevel()
	logrus.SetLevel(level)
	logrus.SetOutput(io.Discard)
	hooks := logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{})
	logrus.AddHook(hook)
	t.Cleanup(func() {
		logrus.StandardLogger().ReplaceHooks(hooks)
		logrus.SetOutput(os.Stderr)
		logrus.SetLevel(before)
	})
}
