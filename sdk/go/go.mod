module kvasir

go 1.24
