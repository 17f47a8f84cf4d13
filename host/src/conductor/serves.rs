//! Which instance can serve which request: models and adapters.

use super::names::Names;
use super::{Error, Registration};
use crate::fleet::{Adapters, Needs};
use kvasir_policy::scheduler::eligibility;
use std::sync::Arc;

/// The most models and the most adapters that have a number.
const MODELS_MAX: usize = 1 << 12;
const ADAPTERS_MAX: usize = 1 << 16;

/// What one instance serves.
#[derive(Debug, Default)]
pub(super) struct Serves {
    /// Sorted. None means any.
    models: Vec<u32>,
    /// Loaded now; sorted, each once.
    adapters: Vec<u32>,
    /// The most that it can hold. `None` means that it does not say.
    adapters_max: Option<u32>,
}

impl Serves {
    /// How many it has, and can have.
    pub(super) fn adapters(&self) -> Adapters {
        Adapters { loaded: self.adapters.len() as u32, most: self.adapters_max }
    }

    fn is_fit_for(&self, needs: Needs) -> u32 {
        let any = self.models.is_empty();
        match needs.model {
            Some(model) if !any && self.models.binary_search(&model).is_err() => eligibility::CANNOT,
            _ if needs.adapter != 0 && self.adapters.binary_search(&needs.adapter).is_ok() => {
                eligibility::HAS_ADAPTER
            }
            _ => eligibility::CAN,
        }
    }
}

/// One of the two tables of instances, by slot. `None` means that nobody is there.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Option<Arc<Serves>>>,
    /// Instances that do not serve every model.
    choosy: usize,
}

impl Table {
    pub(super) fn set(&mut self, slot: Option<u16>, serves: Option<Arc<Serves>>) {
        let Some(slot) = slot.map(usize::from) else { return };
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        let choosy =
            |serves: &Option<Arc<Serves>>| usize::from(serves.as_ref().is_some_and(|s| !s.models.is_empty()));
        self.choosy += choosy(&serves);
        let before = std::mem::replace(&mut self.slots[slot], serves);
        self.choosy -= choosy(&before);
    }

    /// Whether a column can say anything about a request; costs no look at the instances.
    pub(super) fn says_something(&self, needs: Needs) -> bool {
        needs.adapter != 0 || needs.model.is_some() && self.choosy > 0
    }

    /// Writes the column, and says whether it is worth sending: some instance cannot serve the request, or an adapter is
    /// named.
    pub(super) fn fill(&self, needs: Needs, column: &mut [u32]) -> bool {
        column.fill(eligibility::CAN);
        let mut all_can = true;
        for (fit, serves) in column.iter_mut().zip(&self.slots) {
            *fit = serves.as_ref().map_or(eligibility::CAN, |serves| serves.is_fit_for(needs));
            all_can &= *fit != eligibility::CANNOT;
        }
        !all_can || needs.adapter != 0
    }
}

/// Numbers of models and adapters, and who serves them.
#[derive(Debug)]
pub(super) struct Catalogue {
    models: Names,
    adapters: Names,
    pub(super) prefill: Table,
    pub(super) decode: Table,
}

impl Catalogue {
    pub(super) fn new() -> Self {
        Self {
            models: Names::new(MODELS_MAX),
            adapters: Names::new(ADAPTERS_MAX),
            prefill: Table::default(),
            decode: Table::default(),
        }
    }

    /// How often there was no room for a name.
    pub(super) fn refused(&self) -> u64 {
        self.models.refused() + self.adapters.refused()
    }

    /// What an instance serves, from the names that it registers with.
    ///
    /// # Errors
    /// [`Error::TooManyNames`] of models: requests for one that has no number could not be told from others.
    pub(super) fn serves(&mut self, given: &Registration) -> Result<Serves, Error> {
        let Registration { models, adapters, adapters_max, .. } = given;
        let full =
            |name: &String| Error::TooManyNames { what: "model", name: name.clone(), limit: MODELS_MAX };
        let models = models.iter().map(|name| self.models.number(name).ok_or_else(|| full(name)));
        let mut models: Vec<u32> = models.collect::<Result<_, _>>()?;
        models.sort_unstable();
        Ok(Serves { models, adapters: self.loaded(adapters), adapters_max: *adapters_max })
    }

    /// The same instance with other adapters.
    pub(super) fn with_adapters(&mut self, serves: &Serves, adapters: &[String]) -> Serves {
        let (models, adapters_max) = (serves.models.clone(), serves.adapters_max);
        Serves { models, adapters: self.loaded(adapters), adapters_max }
    }

    /// An adapter for which there is no number is as good as not loaded: a hint is lost, and nothing goes wrong.
    fn loaded(&mut self, adapters: &[String]) -> Vec<u32> {
        let mut numbers: Vec<u32> = adapters.iter().filter_map(|name| self.adapters.number(name)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// The numbers of what a request names. Empty means nothing. A name that is new gets a number while half of them are left
    /// to instances.
    pub(super) fn needs(&mut self, model: &str, adapter: &str) -> Needs {
        let known = |names: &mut Names, name: &str| names.number_if_half_empty(name).unwrap_or(0);
        let model = (!model.is_empty()).then(|| known(&mut self.models, model));
        let adapter = if adapter.is_empty() { 0 } else { known(&mut self.adapters, adapter) };
        Needs { model, adapter }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn given(models: Vec<String>, adapters: &[&str]) -> Registration {
        Registration { models, adapters: names(adapters), ..Registration::default() }
    }

    #[test]
    fn an_instance_serves_the_models_it_names_or_any() {
        let mut catalogue = Catalogue::new();
        for (slot, models, adapters) in
            [(0, &["llama", "qwen"][..], &["sql"][..]), (1, &[], &["sql"]), (3, &["qwen"], &[])]
        {
            let serves = catalogue.serves(&given(names(models), adapters)).unwrap();
            catalogue.prefill.set(Some(slot), Some(Arc::new(serves)));
        }
        let mut column = |model: &str, adapter: &str| {
            let needs = catalogue.needs(model, adapter);
            let mut column = [9; 5];
            let sent = catalogue.prefill.says_something(needs) && catalogue.prefill.fill(needs, &mut column);
            sent.then_some(column)
        };
        assert_eq!(column("", ""), None);
        assert_eq!(column("qwen", ""), None, "all can");
        assert_eq!(column("llama", ""), Some([1, 1, 1, 0, 1]));
        assert_eq!(column("llama", "sql"), Some([2, 2, 1, 0, 1]));
        assert_eq!(column("qwen", "sql"), Some([2, 2, 1, 1, 1]));
        assert_eq!(column("", "sql"), Some([2, 2, 1, 1, 1]));
        assert_eq!(column("unheard-of", "new"), Some([0, 1, 1, 0, 1]), "one that serves any");
        let table = &mut catalogue.prefill;
        table.set(Some(3), None);
        table.set(Some(0), Some(Arc::default()));
        assert_eq!(table.choosy, 0);
    }

    #[test]
    fn requests_leave_half_of_the_numbers_to_instances() {
        let mut catalogue = Catalogue::new();
        let asked = |catalogue: &mut Catalogue, n: usize| catalogue.needs(&format!("model-{n}"), "").model;
        for n in 0..MODELS_MAX / 2 {
            assert_eq!(asked(&mut catalogue, n), Some(n as u32 + 1));
        }
        assert_eq!(asked(&mut catalogue, MODELS_MAX), Some(0), "not known here");
        assert_eq!(asked(&mut catalogue, 5), Some(6), "a name keeps its number");
        let own: Vec<String> = (0..MODELS_MAX / 2).map(|n| format!("own-{n}")).collect();
        catalogue.serves(&given(own.clone(), &[])).unwrap();
        let full = catalogue.serves(&given(names(&["one-more"]), &[])).unwrap_err();
        assert!(full.to_string().contains("`one-more` cannot be a model: 4096 names"), "{full}");
        assert_eq!(catalogue.serves(&given(own[..1].to_vec(), &[])).unwrap().models.len(), 1);
    }
}
