//! The components we ship and test with keep to the contract.

use kvasir_tests::component_names;

#[test]
fn default_policies_import_the_log_at_most_and_export_their_slot() {
    use kvasir_default_policies as defaults;
    let mut components = Vec::new();
    components.extend(defaults::SCHEDULERS.iter().map(|d| (d.name, d.component, "scheduling")));
    components.extend(defaults::EVICTORS.iter().map(|d| (d.name, d.component, "eviction")));
    components.extend(defaults::ADMITTERS.iter().map(|d| (d.name, d.component, "admission")));
    components.extend(defaults::BALANCERS.iter().map(|d| (d.name, d.component, "balancing")));
    for (name, component, interface) in components {
        let (imports, mut exports) = component_names(component).unwrap();
        assert!(imports.iter().all(|i| i == "kvasir:policy/log@0.1.0"), "{name} imports {imports:?}");
        exports.sort();
        exports.retain(|export| export != "kvasir:policy/learning@0.1.0"); // those that learn
        let mut wanted = ["control", interface].map(|i| format!("kvasir:policy/{i}@0.1.0"));
        wanted.sort();
        assert_eq!(exports, wanted, "{name}");
    }
}
