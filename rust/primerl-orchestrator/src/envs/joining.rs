//! Compares a worker with the first one of its environment.

use super::wire::{Listing, RegisterRequest};
use parking_lot::Mutex;
use primerl_core::machine::Listed;
use primerl_core::{EnvironmentId, ExampleIndex};
use primerl_service::files::write_whole;
use serde::Serialize;
use std::collections::HashMap;
use std::path::Path;

/// What the first worker registered.
#[derive(Serialize)]
pub(crate) struct First {
    examples: u32,
    /// Without its keys, which are many. `None`: it registered with a version that reports none, or before a restart.
    listing: Option<Listing>,
}

/// The first worker of each environment, with which the others are compared.
#[derive(Debug, Default)]
pub struct FirstWorkers {
    /// Held while a worker is compared: if two come at once, one is the first.
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    listed: HashMap<EnvironmentId, Listed>,
    listings: HashMap<EnvironmentId, Listing>,
}

/// How a worker differs from the first one, for people.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// What the first worker reported.
    WholeGroups(bool),
    Examples(String),
}

impl FirstWorkers {
    /// The first workers from before a restart, as known to the core and from the output folder.
    pub(crate) fn restore(
        &self,
        listed: impl Iterator<Item = (EnvironmentId, Listed)>,
        output_dir: &Path,
    ) {
        *self.known.lock() = Known {
            listed: listed.collect(),
            listings: read(output_dir),
        };
    }

    pub(crate) fn first(&self, environment: EnvironmentId) -> Option<First> {
        let known = self.known.lock();
        let examples = known.listed.get(&environment)?.examples;
        let listing = known.listings.get(&environment).map(|known| Listing {
            keys: Vec::new(),
            ..known.clone()
        });
        Some(First { examples, listing })
    }

    /// The keys of these examples of an environment, `None` where workers have sent none.
    pub(crate) fn keys(
        &self,
        environment: EnvironmentId,
        examples: &[ExampleIndex],
    ) -> Vec<Option<String>> {
        let known = self.known.lock();
        let keys = known.listings.get(&environment).map(|known| &known.keys);
        let key = |example: &ExampleIndex| keys?.get(example.0 as usize).cloned();
        examples.iter().map(key).collect()
    }

    /// Accepts the worker: as the first one, if there is none, or if it equals that one.
    pub(crate) fn admit(
        &self,
        environment: EnvironmentId,
        asked: &RegisterRequest,
        output_dir: &Path,
    ) -> Result<(), Difference> {
        let mut known = self.known.lock();
        if let Some(difference) = known.difference(environment, asked) {
            return Err(difference);
        }
        if known.take(environment, asked) {
            // Once per environment and start, so it may wait for the disk.
            write(&output_dir.join(FILE), &known.listings);
        }
        Ok(())
    }
}

impl Known {
    fn difference(
        &self,
        environment: EnvironmentId,
        asked: &RegisterRequest,
    ) -> Option<Difference> {
        let listed = self.listed.get(&environment);
        let whole_groups = listed.map(|first| first.whole_groups);
        if let Some(first) = whole_groups.filter(|first| *first != asked.whole_groups) {
            return Some(Difference::WholeGroups(first));
        }
        let mut found = Vec::new();
        let examples = listed.map(|first| first.examples);
        if let Some(first) = examples.filter(|first| *first != asked.examples) {
            found.push(format!(
                "lists {} examples, the first one listed {first}",
                asked.examples
            ));
        }
        let listing = self.listings.get(&environment);
        if let (Some(first), Some(own)) = (listing, &asked.listing) {
            let same_number = found.is_empty();
            found.extend(other_packages(first, own));
            if same_number && first.digest != own.digest {
                found.push(format!(
                    "lists other examples: {}",
                    other_examples(first, own)
                ));
            }
        }
        (!found.is_empty()).then(|| Difference::Examples(found.join(", ")))
    }

    /// Records a worker that differs in nothing. Returns whether its listing is new.
    fn take(&mut self, environment: EnvironmentId, asked: &RegisterRequest) -> bool {
        let said = Listed {
            examples: asked.examples,
            whole_groups: asked.whole_groups,
        };
        self.listed.entry(environment).or_insert(said);
        let Some(listing) = &asked.listing else {
            return false;
        };
        let known = self.listings.entry(environment).or_default();
        // After a restart the versions may differ.
        let is_new = known.packages.is_empty();
        if is_new {
            known.clone_from(listing);
            known.environment.clone_from(&asked.environment);
            known.examples = Some(asked.examples);
        }
        is_new
    }
}

fn other_packages(first: &Listing, own: &Listing) -> Option<String> {
    if first.packages.is_empty() {
        return None; // of before a restart
    }
    let names = first.packages.keys().chain(own.packages.keys());
    let names: std::collections::BTreeSet<&String> = names.collect();
    let version = |listing: &Listing, name: &String| listing.packages.get(name).cloned();
    let told = |version: Option<String>| version.unwrap_or_else(|| "none".into());
    let differs = |name: &&String| version(first, name) != version(own, name);
    let other = names.into_iter().filter(differs).map(|name| {
        let (is, was) = (told(version(own, name)), told(version(first, name)));
        format!("{name} {is} where the first one has {was}")
    });
    let other: Vec<String> = other.collect();
    (!other.is_empty()).then(|| format!("has {}", other.join(", ")))
}

fn other_examples(first: &Listing, own: &Listing) -> &'static str {
    match (first.first == own.first, first.last == own.last) {
        (true, true) => "as many, with the same first and last one, but others between them",
        (true, false) => "as many, with the same first one and another last one",
        (false, true) => "as many, with another first one and the same last one",
        (false, false) => "as many, with another first and another last one",
    }
}

/// The file in the output folder with the examples that the first workers listed, for workers that join after a
/// restart.
const FILE: &str = "run/listings.json";

fn write(path: &Path, listings: &HashMap<EnvironmentId, Listing>) {
    let bytes = serde_json::to_vec(&listings.iter().collect::<Vec<_>>()).unwrap_or_default();
    if let Err(error) = write_whole(path, &bytes) {
        tracing::warn!(%error, "cannot save which examples env workers list; after a restart they are not known");
    }
}

/// The listings from before a restart. They have no versions of packages: a run may continue with others.
fn read(output_dir: &Path) -> HashMap<EnvironmentId, Listing> {
    let path = output_dir.join(FILE);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(_) => return HashMap::new(),
    };
    let found: Vec<(EnvironmentId, Listing)> = match serde_json::from_slice(&bytes) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(
                path = %path.display(), %error,
                "the file of listed examples is unreadable; the next worker to register defines the list"
            );
            return HashMap::new();
        }
    };
    let without = |listing: Listing| Listing {
        packages: Default::default(),
        ..listing
    };
    found
        .into_iter()
        .map(|(environment, listing)| (environment, without(listing)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envs::wire::WorkerRole;
    use std::sync::Barrier;

    fn asked(examples: u32, listing: Option<Listing>) -> RegisterRequest {
        RegisterRequest {
            environment: "reverse-text".into(),
            role: WorkerRole::Train,
            name: format!("worker-{examples}"),
            pid: 1,
            examples,
            whole_groups: false,
            max_concurrent: None,
            listing,
        }
    }

    #[test]
    fn one_of_several_workers_that_come_at_once_is_the_first() {
        const WORKERS: u32 = 4;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let first_workers = FirstWorkers::default();
        for environment in (0..500).map(EnvironmentId) {
            let together = Barrier::new(WORKERS as usize);
            let register = |examples| {
                together.wait();
                first_workers.admit(environment, &asked(examples, None), folder.path())
            };
            let answers: Vec<_> = std::thread::scope(|scope| {
                let workers: Vec<_> = (1..=WORKERS)
                    .map(|examples| scope.spawn(move || register(examples)))
                    .collect();
                let answers = workers.into_iter().map(|worker| worker.join());
                answers.map(|answer| answer.expect("no panic")).collect()
            });
            let accepted = answers.iter().filter(|answer| answer.is_ok()).count();
            assert_eq!(accepted, 1, "{answers:?}");
        }
    }

    #[test]
    fn others_are_compared_with_the_first_one_in_all_that_it_registered() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("run")).expect("a folder");
        let (workers, environment) = (FirstWorkers::default(), EnvironmentId(0));
        assert!(workers.first(environment).is_none());
        let admit = |asked: &RegisterRequest| workers.admit(environment, asked, folder.path());
        let first = asked(7, Some(listing("a", "b", "1")));
        assert_eq!(admit(&first), Ok(()));
        assert_eq!(admit(&first), Ok(()));
        let whole = RegisterRequest {
            whole_groups: true,
            ..first.clone()
        };
        assert_eq!(admit(&whole), Err(Difference::WholeGroups(false)));
        let other = asked(7, Some(listing("a", "c", "1")));
        let differs = admit(&other).expect_err("another last one");
        assert!(matches!(differs, Difference::Examples(said) if said.contains("another last one")));
        let known = workers.first(environment).expect("there is one");
        let told = known.listing.expect("was registered");
        assert_eq!(
            (known.examples, &*told.digest, told.keys.len()),
            (7, "ab", 0)
        );
        let saved = &read(folder.path())[&environment];
        assert_eq!(
            (&*saved.digest, &*saved.environment),
            ("ab", "reverse-text")
        );
        assert_eq!(saved.keys, ["a", "b"]);
        assert_eq!(saved.examples, Some(7));
    }

    fn listing(first: &str, last: &str, version: &str) -> Listing {
        let packages = [
            ("reverse-text".to_owned(), version.to_owned()),
            ("verifiers".to_owned(), "0.4.0".to_owned()),
        ];
        Listing {
            digest: format!("{first}{last}"),
            first: first.into(),
            last: last.into(),
            packages: packages.into(),
            keys: vec![first.into(), last.into()],
            environment: String::new(),
            examples: None,
        }
    }

    #[test]
    fn other_versions_are_named_with_both_of_them() {
        let (one, other) = (listing("a", "b", "0.1.0"), listing("a", "b", "0.2.0"));
        assert_eq!(other_packages(&one, &one), None);
        assert_eq!(
            other_packages(&one, &other).as_deref(),
            Some("has reverse-text 0.2.0 where the first one has 0.1.0")
        );
        let without = Listing {
            packages: Default::default(),
            ..one.clone()
        };
        assert_eq!(other_packages(&without, &one), None);
        assert_eq!(
            other_packages(&one, &without).as_deref(),
            Some(
                "has reverse-text none where the first one has 0.1.0, verifiers none where the first one has 0.4.0"
            )
        );
    }

    #[test]
    fn examples_are_known_after_a_restart_and_versions_are_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(read(folder.path()), HashMap::new());
        std::fs::create_dir(folder.path().join("run")).expect("a folder");
        let known = HashMap::from([(EnvironmentId(1), listing("a", "b", "0.1.0"))]);
        write(&folder.path().join(FILE), &known);
        let found = read(folder.path());
        let found = &found[&EnvironmentId(1)];
        assert_eq!((&*found.digest, found.packages.len()), ("ab", 0));
        let workers = FirstWorkers::default();
        workers.restore(std::iter::empty(), folder.path());
        let keys =
            |environment| workers.keys(EnvironmentId(environment), &[1, 0, 2].map(ExampleIndex));
        assert_eq!(keys(1), [Some("b".into()), Some("a".into()), None]);
        assert_eq!(keys(0), [None, None, None], "an older worker sent none");
    }

    #[test]
    fn the_error_says_where_examples_differ_as_far_as_it_is_known() {
        let one = listing("a", "b", "1");
        assert!(other_examples(&one, &listing("a", "c", "1")).contains("another last one"));
        assert!(other_examples(&one, &listing("c", "b", "1")).contains("another first one"));
        assert!(other_examples(&one, &listing("a", "b", "1")).contains("between"));
    }
}
