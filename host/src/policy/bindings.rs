//! Host side of the contract, generated from `wit/policy-0.1`, one module per world.

use super::guest::State;
use wasmtime::component::Linker;

pub(super) mod scheduler {
    wasmtime::component::bindgen!({ path: "../wit/policy-0.1", world: "scheduler" });
}

pub(super) mod evictor {
    wasmtime::component::bindgen!({
        path: "../wit/policy-0.1",
        world: "evictor",
        with: { "kvasir:policy/log@0.1.0": super::scheduler::kvasir::policy::log },
    });
}

pub(super) mod admitter {
    wasmtime::component::bindgen!({
        path: "../wit/policy-0.1",
        world: "admitter",
        with: { "kvasir:policy/log@0.1.0": super::scheduler::kvasir::policy::log },
    });
}

pub(super) mod balancer {
    wasmtime::component::bindgen!({
        path: "../wit/policy-0.1",
        world: "balancer",
        with: { "kvasir:policy/log@0.1.0": super::scheduler::kvasir::policy::log },
    });
}

/// The learning half of a component, whatever its slot.
pub(super) mod learner {
    wasmtime::component::bindgen!({
        inline: "
            package kvasir:host;
            world learner {
                import kvasir:policy/log@0.1.0;
                export kvasir:policy/control@0.1.0;
                export kvasir:policy/learning@0.1.0;
            }
        ",
        path: "../wit/policy-0.1",
        world: "kvasir:host/learner",
        with: { "kvasir:policy/log@0.1.0": super::scheduler::kvasir::policy::log },
    });
}

impl scheduler::kvasir::policy::log::Host for State {
    fn log(&mut self, level: u32, message: String) {
        self.add_log(level, &message);
    }
}

/// The only import of the contract.
pub(super) fn add_log(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    scheduler::kvasir::policy::log::add_to_linker::<_, wasmtime::component::HasSelf<State>>(linker, |s| s)
}
