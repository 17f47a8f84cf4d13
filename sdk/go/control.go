package kvasir

import (
	"errors"
	"slices"
)

// Control is `control` of a policy, as the host calls it.
type Control struct{ Policy Policy }

// Configure hands each setting to the policy, with the value given for it or the default.
func (c Control) Configure(given map[string]string) error {
	settings := c.Policy.Describe().Settings
	for name := range given {
		if !slices.ContainsFunc(settings, func(s Setting) bool { return s.Name == name }) {
			return errors.New("unknown setting: " + name)
		}
	}
	configurer, ok := c.Policy.(Configurer)
	if !ok {
		return nil
	}
	for _, setting := range settings {
		value, ok := given[setting.Name]
		if !ok {
			value = setting.Default
		}
		if err := configurer.Configure(setting.Name, value); err != nil {
			return err
		}
	}
	return nil
}

// ExportState is what the successor should know; empty = nothing.
func (c Control) ExportState() []byte {
	if keeper, ok := c.Policy.(StateKeeper); ok {
		return keeper.ExportState()
	}
	return nil
}

// ImportState offers what the predecessor exported.
func (c Control) ImportState(state []byte) error {
	if keeper, ok := c.Policy.(StateKeeper); ok {
		return keeper.ImportState(state)
	}
	return errors.New("this policy keeps no state")
}
