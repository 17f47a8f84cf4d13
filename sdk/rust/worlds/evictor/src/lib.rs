//! Bindings of the `evictor` world, generated from `sdk/wit`. A crate of its own because
//! the export macros of two worlds that share an interface have the same names.
#![cfg(target_arch = "wasm32")]

wit_bindgen::generate!({
    path: "../../../wit",
    world: "evictor",
    pub_export_macro: true,
    default_bindings_module: "kvasir_policy::bindings::evictor",
});
