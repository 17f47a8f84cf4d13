//! Glue between the traits and the component model. Compiled for Wasm only; natively the
//! `export_…!` macros expand to nothing.

/// Bindings that `wit-bindgen` generates, one crate per world.
#[doc(hidden)]
#[cfg(target_arch = "wasm32")]
pub mod bindings {
    pub use kvasir_world_admitter as admitter;
    pub use kvasir_world_balancer as balancer;
    pub use kvasir_world_evictor as evictor;
    pub use kvasir_world_learning_admitter as learning_admitter;
    pub use kvasir_world_learning_scheduler as learning_scheduler;
    pub use kvasir_world_scheduler as scheduler;

    pub fn log(level: u32, message: &str) {
        scheduler::kvasir::policy::log::log(level, message);
    }
}

/// Implements `control` for a wrapper type around a policy kept in a thread-local.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_control {
    ($world:ident, $with:ident) => {
        impl $crate::bindings::$world::exports::kvasir::policy::control::Guest for Component {
            fn describe() -> $crate::bindings::$world::exports::kvasir::policy::control::Description {
                use $crate::bindings::$world::exports::kvasir::policy::control as wit;
                let d = $with(|policy| policy.describe());
                let setting =
                    |s: $crate::Setting| wit::Setting { name: s.name, default: s.default, doc: s.doc };
                wit::Description {
                    name: d.name,
                    version: d.version,
                    slot: d.slot,
                    settings: d.settings.into_iter().map(setting).collect(),
                }
            }
            fn configure(settings: Vec<(String, String)>) -> Result<(), String> {
                $with(|policy| {
                    let settings = $crate::Settings::new(&policy.describe(), &settings)?;
                    policy.configure(&settings)
                })
            }
            fn export_state() -> Vec<u8> {
                $with(|policy| policy.export_state())
            }
            fn import_state(state: Vec<u8>) -> Result<(), String> {
                $with(|policy| policy.import_state(&state))
            }
        }
    };
}

/// Implements `learning` for the same wrapper type.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_learning {
    ($world:ident, $with:ident, learns) => {
        impl $crate::bindings::$world::exports::kvasir::policy::learning::Guest for Component {
            fn observe(stride: u32, outcomes: Vec<u32>) {
                let outcomes = $crate::learning::Outcomes::new(stride as usize, &outcomes);
                $with(|policy| $crate::Learner::observe(policy, outcomes))
            }
            fn publish() -> Vec<u8> {
                $with(|policy| $crate::Learner::publish(policy))
            }
            fn adopt(knowledge: Vec<u8>) {
                $with(|policy| $crate::Learner::adopt(policy, &knowledge))
            }
        }
    };
}

/// Exports a type that implements [`Scheduler`](crate::Scheduler) and `Default` as a component.
#[macro_export]
macro_rules! export_scheduler {
    ($policy:ty) => {
        $crate::export_scheduler!(@ scheduler, $policy);
    };
    (@ $world:ident $($learns:ident)?, $policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::Scheduler as _;
            use $crate::bindings::$world::exports::kvasir::policy::scheduling;
            use $crate::scheduler::{Answer, Kept};

            struct Component;

            std::thread_local! {
                static KEPT: std::cell::RefCell<Kept<$policy>> =
                    std::cell::RefCell::new(Kept::new(Default::default()));
            }
            fn kept<R>(f: impl FnOnce(&mut Kept<$policy>) -> R) -> R {
                KEPT.with_borrow_mut(f)
            }
            fn policy<R>(f: impl FnOnce(&mut $policy) -> R) -> R {
                kept(|k| f(k.scheduler()))
            }
            $crate::__export_control!($world, policy);
            $($crate::__export_learning!($world, policy, $learns);)?

            impl scheduling::Guest for Component {
                fn open(layout: Vec<u32>) {
                    kept(|k| k.open(&layout))
                }
                fn update_prefill(rows: Vec<f32>) {
                    kept(|k| k.update_prefill(&rows))
                }
                fn update_decode(rows: Vec<f32>) {
                    kept(|k| k.update_decode(&rows))
                }
                fn update_links(rows: Vec<f32>) {
                    kept(|k| k.update_links(&rows))
                }
                fn set_thresholds(values: Vec<f32>) {
                    kept(|k| k.set_thresholds(&values))
                }
                fn schedule(now: f32, question: Vec<u32>) -> scheduling::Decision {
                    let answer = Answer::from(kept(|k| k.schedule(now, &question)));
                    scheduling::Decision {
                        prefill: answer.prefill,
                        decode: answer.decode,
                        transfer_blocks: answer.transfer_blocks,
                        source: answer.source,
                        reason: answer.reason,
                        retry_after: answer.retry_after,
                        session_memo: answer.session_memo,
                        tenant_charge: answer.tenant_charge,
                    }
                }
                fn explain(now: f32, question: Vec<u32>) -> Vec<f32> {
                    kept(|k| k.explain(now, &question))
                }
            }
    $crate::bindings::$world::export!(Component with_types_in $crate::bindings::$world);
        };
    };
}

/// Exports a type that implements [`Scheduler`](crate::Scheduler), [`Learner`](crate::Learner) and `Default` as a component.
#[macro_export]
macro_rules! export_learning_scheduler {
    ($policy:ty) => {
        $crate::export_scheduler!(@ learning_scheduler learns, $policy);
    };
}

/// Exports a type that implements [`Evictor`](crate::Evictor) and `Default` as a component.
#[macro_export]
macro_rules! export_evictor {
    ($policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::Evictor as _;
            use $crate::bindings::evictor::exports::kvasir::policy::eviction;
            use $crate::evictor::Kept;

            struct Component;

            std::thread_local! {
                static KEPT: std::cell::RefCell<Kept<$policy>> =
                    std::cell::RefCell::new(Kept::new(Default::default()));
            }
            fn kept<R>(f: impl FnOnce(&mut Kept<$policy>) -> R) -> R {
                KEPT.with_borrow_mut(f)
            }
            fn policy<R>(f: impl FnOnce(&mut $policy) -> R) -> R {
                kept(|k| f(k.evictor()))
            }
            $crate::__export_control!(evictor, policy);

            impl eviction::Guest for Component {
                fn open(layout: Vec<u32>) {
                    kept(|k| k.open(&layout))
                }
                fn update_tiers(rows: Vec<f32>) {
                    kept(|k| k.update_tiers(&rows))
                }
                fn on_events(base: u64, events: Vec<u32>) {
                    kept(|k| k.on_events(base, &events))
                }
                fn select_victims(now: u64, want: u32) -> Vec<u32> {
                    kept(|k| k.select_victims(now, want).collect())
                }
            }
    $crate::bindings::evictor::export!(Component with_types_in $crate::bindings::evictor);
        };
    };
}

/// Exports a type that implements [`Admitter`](crate::Admitter) and `Default` as a component.
#[macro_export]
macro_rules! export_admitter {
    ($policy:ty) => {
        $crate::export_admitter!(@ admitter, $policy);
    };
    (@ $world:ident $($learns:ident)?, $policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::Admitter as _;
            use $crate::admitter::{Blocks, Forecast, Load, Request};
            use $crate::bindings::$world::exports::kvasir::policy::admission;

            struct Component;

            std::thread_local! {
                static POLICY: std::cell::RefCell<$policy> = std::cell::RefCell::new(Default::default());
            }
            fn policy<R>(f: impl FnOnce(&mut $policy) -> R) -> R {
                POLICY.with_borrow_mut(f)
            }
            $crate::__export_control!($world, policy);
            $($crate::__export_learning!($world, policy, $learns);)?

            impl admission::Guest for Component {
                fn update_load(values: Vec<f32>) {
                    policy(|p| p.update_load(&Load::decode(&values)))
                }
                fn admit_request(request: Vec<u32>, forecast: Vec<f32>) -> u64 {
                    let (request, forecast) = (Request::decode(&request), Forecast::decode(&forecast));
                    policy(|p| p.admit_request(&request, &forecast)).pack()
                }
                fn admit_blocks(tier: u32, stride: u32, blocks: Vec<u32>) -> Vec<u32> {
                    let blocks = Blocks::new(stride, &blocks);
                    let mut answers = Vec::with_capacity(blocks.len());
                    policy(|p| p.admit_blocks(tier, blocks, &mut answers));
                    answers.into_iter().map(|a| a as u32).collect()
                }
            }
    $crate::bindings::$world::export!(Component with_types_in $crate::bindings::$world);
        };
    };
}

/// Exports a type that implements [`Admitter`](crate::Admitter), [`Learner`](crate::Learner) and `Default` as a component.
#[macro_export]
macro_rules! export_learning_admitter {
    ($policy:ty) => {
        $crate::export_admitter!(@ learning_admitter learns, $policy);
    };
}

/// Exports a type that implements [`Balancer`](crate::Balancer) and `Default` as a component.
#[macro_export]
macro_rules! export_balancer {
    ($policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::Balancer as _;
            use $crate::balancer::Snapshot;
            use $crate::bindings::balancer::exports::kvasir::policy::balancing;

            struct Component;

            std::thread_local! {
                static POLICY: std::cell::RefCell<$policy> = std::cell::RefCell::new(Default::default());
            }
            fn policy<R>(f: impl FnOnce(&mut $policy) -> R) -> R {
                POLICY.with_borrow_mut(f)
            }
            $crate::__export_control!(balancer, policy);

            impl balancing::Guest for Component {
                fn tick(
                    now: u64,
                    cluster: Vec<f32>,
                    prefill_queue: Vec<f32>,
                    decode_step: Vec<f32>,
                ) -> Vec<f32> {
                    policy(|p| p.tick(&Snapshot::decode(now, &cluster, prefill_queue, decode_step)))
                }
            }
    $crate::bindings::balancer::export!(Component with_types_in $crate::bindings::balancer);
        };
    };
}
