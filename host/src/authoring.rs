//! Writing a policy: a project of its own, a component made of it, and a trial before it meets a host.
//!
//! No host need run for any of this, and Kvasir's source need not be there: templates, SDKs and the contract are in the binary.
//! [`create`] writes a project, [`build()`] makes its component, [`check()`] tries that.

mod build;
mod check;
mod component;
mod create;
mod error;
mod language;
mod project;
mod sdk;

pub use build::{Built, build};
pub use check::{Report, Row, Trial, Verdict, check};
pub use create::create;
pub use error::Error;
pub use language::{DIALECTS, Dialect, LANGUAGES, Language, MissingTool};
pub use project::{DEADLINE_MIN, MANIFEST, MEMORY_MIN, Project};

#[cfg(test)]
mod tests;
