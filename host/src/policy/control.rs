//! `control` of the contract, for components of any world and for native policies.

/// Implements [`super::slot::Policy`] for a guest of one world.
macro_rules! component_control {
    ($world:ident :: $bindings:ident) => {
        impl $crate::policy::slot::Policy
            for $crate::policy::guest::Guest<$crate::policy::bindings::$world::$bindings>
        {
            fn describe(&mut self) -> Result<kvasir_policy::Description, $crate::policy::Fault> {
                let d = self.cold("describe", |b, store| b.kvasir_policy_control().call_describe(store))?;
                let setting =
                    |s: $crate::policy::bindings::$world::exports::kvasir::policy::control::Setting| {
                        kvasir_policy::Setting { name: s.name, default: s.default, doc: s.doc }
                    };
                Ok(kvasir_policy::Description {
                    name: d.name,
                    version: d.version,
                    slot: d.slot,
                    settings: d.settings.into_iter().map(setting).collect(),
                })
            }

            fn configure(
                &mut self,
                settings: &[(String, String)],
            ) -> Result<Result<(), String>, $crate::policy::Fault> {
                self.cold("configure", |b, store| b.kvasir_policy_control().call_configure(store, settings))
            }

            fn export_state(&mut self) -> Result<Vec<u8>, $crate::policy::Fault> {
                self.cold("export-state", |b, store| b.kvasir_policy_control().call_export_state(store))
            }

            fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, $crate::policy::Fault> {
                self.cold("import-state", |b, store| {
                    b.kvasir_policy_control().call_import_state(store, state)
                })
            }

            fn adopt(&mut self, knowledge: &[u8]) -> Result<(), $crate::policy::Fault> {
                self.take_up(knowledge)
            }

            fn called(&self) -> &'static str {
                self.called()
            }
        }
    };
}

/// Implements [`super::slot::Policy`] for a native engine; `$policy` finds the policy in `self`.
macro_rules! native_control {
    ($engine:ty, $this:ident => $policy:expr) => {
        impl $crate::policy::slot::Policy for $engine {
            fn describe(&mut self) -> Result<kvasir_policy::Description, $crate::policy::Fault> {
                let $this = self;
                Ok($policy.describe())
            }

            fn configure(
                &mut self,
                settings: &[(String, String)],
            ) -> Result<Result<(), String>, $crate::policy::Fault> {
                let $this = self;
                let settings = kvasir_policy::Settings::new(&$policy.describe(), settings);
                Ok(settings.and_then(|settings| $policy.configure(&settings)))
            }

            fn export_state(&mut self) -> Result<Vec<u8>, $crate::policy::Fault> {
                let $this = self;
                Ok($policy.export_state())
            }

            fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, $crate::policy::Fault> {
                let $this = self;
                Ok($policy.import_state(state))
            }
        }
    };
}

pub(super) use {component_control, native_control};
