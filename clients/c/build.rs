//! Gives the shared library the name by which programs find it, with the version of its interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvasir.so.1");
}
