module my-learner

go 1.24

require kvasir v0.1.0

replace kvasir => ../../../sdk/go
